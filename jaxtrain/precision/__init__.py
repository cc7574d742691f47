"""Dtype policies and loss scaling."""
