"""Eight simulated CPU devices for every test, set before JAX is imported.

On a machine with a GPU, JAXTRAIN_TEST_PLATFORMS=cuda,cpu also runs what needs one; JAXTRAIN_TEST_DEVICES=16 is for
`make matrix`.
"""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAXTRAIN_TEST_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = os.environ.get("JAXTRAIN_TEST_DEVICES", "8")
# Compiling is most of a test's time: the cheapest code generation takes a quarter of it. Collectives are the same;
# only elementwise operations are fused otherwise.
CHEAP = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
if CHEAP not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CHEAP}".strip()
