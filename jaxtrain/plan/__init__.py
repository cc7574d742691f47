"""What a step needs before it runs: bytes on the wire and in memory, read off the program compiled for a target."""
