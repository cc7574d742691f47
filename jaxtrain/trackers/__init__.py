"""Where metrics and events go: files, the console, TensorBoard, W&B, MLflow."""
