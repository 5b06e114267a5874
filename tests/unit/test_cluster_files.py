"""Clusters from YAML and TOML: what they may say, and what is said of those that describe none."""

from pathlib import Path

import pytest

from poise.lab import clusters
from poise.lab.clusters import read_cluster
from poise.scheduler.model.cluster import Node, parse_cluster
from poise.scheduler.model.errors import ClusterError

YAML = """
nodes:
  - {type: v100, gpus: 8, count: 2, rack: north}
  - {type: K80, gpus: 3}
  - {name: big, type: k80, gpus: 16, rack: 7}
  - {name: twin, type: k80, gpus: 1, count: 2}
types:
  v100: {price: 3}
  K80: {speed: 0.25, price: 0.5}
"""
TOML = """
nodes = [
  {type = "v100", gpus = 8, count = 2, rack = "north"},
  {type = "K80", gpus = 3},
  {name = "big", type = "k80", gpus = 16, rack = 7},
  {name = "twin", type = "k80", gpus = 1, count = 2},
]
[types.v100]
price = 3
[types.K80]
speed = 0.25
price = 0.5
"""


@pytest.mark.parametrize(("name", "text"), [("c.yaml", YAML), ("c.YML", YAML), ("c.toml", TOML)])
def test_a_file_says_nodes_racks_counts_speeds_and_prices(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    cluster = read_cluster(str(tmp_path / name))
    assert cluster.nodes == (
        Node("v100-0", "v100", 8, "north"),
        Node("v100-1", "v100", 8, "north"),
        Node("k80-2", "k80", 3, "rack-0"),
        Node("big", "k80", 16, "7"),
        Node("twin-0", "k80", 1, "rack-0"),
        Node("twin-1", "k80", 1, "rack-0"),
    )
    assert cluster.speeds == {"k80": 0.25}
    assert cluster.prices == {"v100": 3, "k80": 0.5}
    assert cluster.gpu_types == ("v100", "k80")
    assert (cluster.gpus, cluster.gpus_of("k80")) == (37, 21)


@pytest.mark.parametrize("spec", ["v100:12", "v100:12@8,k80:3@1", "gpu:1"])
def test_a_specification_is_read_as_such(spec: str) -> None:
    assert read_cluster(spec) == parse_cluster(spec)


def test_uneven_counts_leave_a_smaller_last_node() -> None:
    assert [node.gpus for node in read_cluster("v100:11@4").nodes] == [4, 4, 3]


NODE = "nodes: [{type: gpu, gpus: 4}]\n"
ONE = "expected a list `nodes`, e.g. nodes: [{type: v100, gpus: 8, count: 4}]"
WRONG: dict[str, tuple[str, str]] = {
    "empty": ("", ONE),
    "text": ("lorem ipsum", ONE),
    "a list": ("- {type: gpu, gpus: 4}", ONE),
    "no nodes": ("types: {}", ONE),
    "nodes that are no list": ("nodes: 4", ONE),
    "no node at all": ("nodes: []", "the cluster has no node"),
    "an unknown key": (NODE + "racks: 3", "unknown key 'racks'; known: nodes, types"),
    "a key that is a number": (NODE + "7: 3", "unknown key '7'"),
    "a node that is text": ("nodes: [v100]", "node 1: expected {type: NAME, gpus: COUNT}, got 'v100'"),
    "a node without a type": ("nodes: [{gpus: 4}]", "node 1: expected {type: NAME, gpus: COUNT}, got {'gpus': 4}"),
    "a type that is a number": ("nodes: [{type: 4, gpus: 4}]", "node 1: expected {type: NAME"),
    "the second node": (
        "nodes: [{type: gpu, gpus: 4}, {type: gpu}]",
        "node 2: gpus: expected a whole number from 1 to 1,000,000, got None",
    ),
    "an unknown key of a node": (
        "nodes: [{type: gpu, gpus: 4, cont: 3}]",
        "node 1: unknown key 'cont'; known: count, gpus, name, rack, type",
    ),
    "no GPUs": ("nodes: [{type: gpu, gpus: 0}]", "gpus: expected a whole number from 1 to 1,000,000, got 0"),
    "fewer GPUs than none": ("nodes: [{type: gpu, gpus: -4}]", "gpus: expected a whole number"),
    "half a GPU": ("nodes: [{type: gpu, gpus: 1.5}]", "gpus: expected a whole number"),
    "true GPUs": ("nodes: [{type: gpu, gpus: true}]", "gpus: expected a whole number"),
    "GPUs in words": ("nodes: [{type: gpu, gpus: four}]", "gpus: expected a whole number from 1 to 1,000,000, got 'four'"),
    "GPUs by the date": ("nodes: [{type: gpu, gpus: 2020-13-45}]", "month must be in 1..12"),
    "no count": ("nodes: [{type: gpu, gpus: 1, count: 0}]", "count: expected a whole number"),
    "too many nodes": ("nodes: [{type: gpu, gpus: 1, count: 1000001}]", "count: expected a whole number"),
    "too many GPUs": ("nodes: [{type: gpu, gpus: 2, count: 500001}]", "more than 1,000,000 GPUs"),
    "too many GPUs in all": ("nodes: [{type: a, gpus: 999999}, {type: b, gpus: 2}]", "more than 1,000,000 GPUs"),
    "one name twice": (
        "nodes: [{type: gpu, gpus: 1, name: a}, {type: gpu, gpus: 1, name: a}]",
        "two nodes of the cluster have the same name",
    ),
    "types that are a list": (NODE + "types: [gpu]", "types: expected {NAME: {speed: NUMBER, price: NUMBER}}"),
    "a type that is no mapping": (NODE + "types: {gpu: 3}", "type 'gpu': expected some of price, speed, got 3"),
    "an unknown figure": (NODE + "types: {gpu: {sped: 3}}", "type 'gpu': expected some of price, speed, got {'sped': 3}"),
    "no speed": (NODE + "types: {gpu: {speed: 0}}", "type 'gpu': speed: expected a number above 0"),
    "an endless speed": (NODE + "types: {gpu: {speed: .inf}}", "type 'gpu': speed: expected a number above 0"),
    "a speed that is no number": (NODE + "types: {gpu: {speed: .nan}}", "type 'gpu': speed: expected a number above 0"),
    "a true price": (NODE + "types: {gpu: {price: true}}", "type 'gpu': price: expected a number above 0"),
    "a price beyond floats": (NODE + "types: {gpu: {price: 1" + "0" * 400 + "}}", "type 'gpu': price: expected a number"),
    "an open bracket": ("nodes: [a", "while parsing a flow sequence"),
    "two documents": ("a: 1\n---\nb: 2\n", "expected a single document"),
    "an object": ("nodes: !!python/object:os.system x", "could not determine a constructor"),
    "brackets without end": ("[" * 500, "nested too deeply; that is no cluster"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_describes_no_cluster_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    text, want = WRONG[what]
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        read_cluster(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert want in message
    assert "\n" not in message
    assert len(message) < 400


def test_a_toml_file_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("nodes = [\n")
    with pytest.raises(ClusterError, match=r"c.toml: Invalid value \(at end of document\)"):
        read_cluster(str(path))
    path.write_text("nodes = " + "[" * 3_000)
    with pytest.raises(ClusterError, match="nested too deeply"):
        read_cluster(str(path))


def test_binary_and_folders_and_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00nodes")
    with pytest.raises(ClusterError, match=r"c\.yaml: not UTF-8 text"):
        read_cluster(str(tmp_path / "c.yaml"))
    (tmp_path / "c.yaml").write_bytes(b"nodes: \x01")
    with pytest.raises(ClusterError, match=r"c\.yaml: not YAML: it holds the control character U\+0001; take it out$"):
        read_cluster(str(tmp_path / "c.yaml"))
    (tmp_path / "d.yaml").mkdir()
    with pytest.raises(ClusterError, match=r"d\.yaml: Is a directory"):
        read_cluster(str(tmp_path / "d.yaml"))
    with pytest.raises(ClusterError, match=r"e\.toml: No such file"):
        read_cluster(str(tmp_path / "e.toml"))


def test_a_file_that_repeats_itself_a_billion_times_is_refused_in_few_words(tmp_path: Path) -> None:
    text = "x"
    for name in "abcdefghi":
        text = f"[&{name} {text}" + f", *{name}" * 8 + "]"
    (tmp_path / "c.yaml").write_text(f"nodes: [{text}]")
    with pytest.raises(ClusterError, match="node 1: expected") as caught:
        read_cluster(str(tmp_path / "c.yaml"))
    assert len(str(caught.value)) < 1000 + len(str(tmp_path))


def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_LARGEST_FILE", 10)
    (tmp_path / "c.yaml").write_text(NODE)
    with pytest.raises(ClusterError, match=r"c\.yaml: larger than"):
        read_cluster(str(tmp_path / "c.yaml"))


def test_many_nodes_one_by_one_are_added_up_once_each(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("nodes = [" + '{type = "gpu", gpus = 2},' * 3000 + "]")
    assert read_cluster(str(tmp_path / "c.toml")).gpus == 6000
