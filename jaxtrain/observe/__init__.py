"""What a run tells: trackers, the live screen, the loss plot, FLOPs and rates."""
