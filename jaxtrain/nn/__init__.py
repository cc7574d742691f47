"""Layers with logical dim names: linear, norm, attention, MLP, mixture of experts, layer stacks."""
