"""The parameter server: its coordinator decides, its processes compute."""
