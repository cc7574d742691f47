"""Mesh of a generation, by the layout check; directory of the run, chosen once."""

from __future__ import annotations

from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.launch.job import ElasticJob, open_job

CONFIG = """
dir: {dir}/runs
simulate: 8
layout: {layout}
mesh: {mesh}
model: {{embed: 32, layers: 2, heads: 4, mlp: 64}}
data: {{sources: [{{path: {dir}}}], sequence: 32, global_batch: 24, cache_dir: {dir}/cache}}
"""


def written(place: Path, layout: str, mesh: str) -> str:
    path = place / "config.yaml"
    path.write_text(CONFIG.format(dir=place, layout=layout, mesh=mesh))
    return str(path)


def opened(place: Path, mesh: str, *fallbacks: str, processes: int = 4, layout: str = "fsdp_tp") -> ElasticJob:
    groups = [group.split() for group in fallbacks]
    return open_job(written(place, layout, mesh), ["optimizer.lr=1e-4"], processes, 2, groups)


def test_the_free_axis_takes_what_is_there(tmp_path):
    job = opened(tmp_path, "{fsdp: -1, model: 2}")
    meshes = {n: job.largest_placement(n).mesh for n in (4, 2, 1)}
    assert meshes == {4: "fsdp 4 x model 2", 2: "fsdp 2 x model 2", 1: "model 2"}
    assert job.largest_placement(4).config.simulate == 8
    assert job.largest_placement(2).config.simulate == 4
    assert job.largest_placement(2).config.data.global_batch == 24


def test_what_cannot_be_divided_stays_idle(tmp_path):
    job = opened(tmp_path, "{fsdp: -1, model: 2}")
    five, three = job.largest_placement(5), job.largest_placement(3)
    assert (five.processes, five.devices) == (4, 8)  # 5 divides neither the rows nor the width
    assert (three.processes, three.devices) == (2, 4)  # 3 divides the 24 rows but no width of 32


def test_fallbacks_are_tried_in_their_order_before_processes_are_left_idle(tmp_path):
    first, second = "mesh.model=1 mesh.fsdp=1 mesh.data=6", "mesh.model=1 mesh.fsdp=2 mesh.data=-1"
    rules = "rules.batch=[data,fsdp]"
    job = opened(tmp_path, "{fsdp: 2, model: 4}", f"{first} {rules}", f"{second} {rules}")
    assert job.largest_placement(4).overrides == ("simulate=8",)
    three = job.largest_placement(3)
    assert (three.processes, three.mesh) == (3, "data 6")
    two = job.largest_placement(2)
    assert (two.processes, two.mesh) == (2, "data 2 x fsdp 2")
    assert two.overrides == ("simulate=4", *second.split(), rules)
    assert job.largest_placement(4).mesh == "fsdp 2 x model 4"  # what fell back comes back


def test_a_mesh_that_nothing_fits_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="and there are 6"):
        opened(tmp_path, "{fsdp: 2, model: 4}", processes=3)
    assert not (tmp_path / "runs").exists()


def test_a_run_is_settled_once_and_its_config_loads_by_itself(tmp_path):
    job = opened(tmp_path, "{fsdp: -1, model: 2}", "mesh.model=1")
    assert job.directory == tmp_path / "runs" / "run"
    assert job.newest_checkpoint() is None
    job.write_config(job.placement(2, ["mesh.model=1"]))
    config = jaxtrain.load(job.directory / "config.yaml")
    assert (config.simulate, config.mesh.model, config.optimizer.lr) == (4, 1, 1e-4)
    again = open_job(str(job.directory), [], 2, 2, [])
    assert again.directory == job.directory


def test_the_same_line_goes_on_whatever_mesh_a_generation_had(tmp_path):
    mesh, fallback = "{fsdp: -1, model: 2}", "mesh.model=1"
    job = opened(tmp_path, mesh, fallback)
    job.write_config(job.placement(2, [fallback]))
    assert opened(tmp_path, mesh, fallback, processes=3).directory == job.directory
    with pytest.raises(ConfigError, match=r"mesh\.model: 1 -> 2; expected the config of the run there"):
        opened(tmp_path, mesh)
    with pytest.raises(ConfigError, match=r"seed: 0 -> 1"):
        open_job(str(tmp_path / "config.yaml"), ["optimizer.lr=1e-4", "seed=1"], 4, 2, [[fallback]])
    new = open_job(str(tmp_path / "config.yaml"), [], 4, 2, [], continues=False)
    assert new.directory == tmp_path / "runs" / "run-2"


def test_shares_of_the_simulated_devices(tmp_path):
    source = written(tmp_path, "fsdp", "{fsdp: -1}")
    assert open_job(source, [], 4, None, []).devices == 2
    assert open_job(source, ["simulate=null"], 2, None, []).devices == 1
    with pytest.raises(UserError, match="cannot be divided among 3"):
        open_job(source, [], 3, None, [])


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match="not a run"):
        open_job(str(tmp_path), [], 1, 1, [])
