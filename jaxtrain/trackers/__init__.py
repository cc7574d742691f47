"""Trackers of metrics and events: files, the console, TensorBoard, W&B, MLflow; time accounting."""
