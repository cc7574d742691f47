"""What keeps a run going, or ends it in one clear line, when something goes wrong."""
