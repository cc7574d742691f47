"""Example models and data, written as users write their own."""
