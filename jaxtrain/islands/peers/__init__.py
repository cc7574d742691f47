"""Islands without a server: the islands of a round average their parameters among themselves."""
