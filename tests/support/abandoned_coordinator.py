"""A coordinator whose launcher falls silent, on a cluster that stays."""

import sys
import time
from pathlib import Path

import ray

from jaxtrain.config.schema import Config
from jaxtrain.islands import ray_engine


def main(folder: Path) -> None:
    config = Config(islands={"count": 2}, sync={"strategy": "diloco"})
    with ray_engine.cluster("run", None, 100 << 20):
        first = ray_engine.start_coordinator(config, folder, "first", silence=3.0)
        pid = ray.get(first.pid.remote())
        assert ray.get(ray_engine.start_coordinator(config, folder, "second", silence=3.0).pid.remote()) == pid
        end = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < end
            time.sleep(0.2)
        again = ray_engine.start_coordinator(config, folder, "third", silence=3.0)
        assert ray.get(again.pid.remote()) != pid
        ray_engine.finish(again, "third")
    print("ended, and started anew")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
