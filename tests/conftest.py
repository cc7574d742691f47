"""Eight simulated CPU devices for every test, set before JAX is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")
