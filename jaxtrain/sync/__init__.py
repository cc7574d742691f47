"""Synchronisation of replicas: strategies by which they agree."""
