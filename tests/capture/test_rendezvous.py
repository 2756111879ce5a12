"""A run outside torchrun is a job of one rank that needs no port of its own."""

from __future__ import annotations

import os

import pytest
import torch

from bridge.capture.surroundings import process_state, rendezvous

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch is built without distributed"
)


def test_the_store_chooses_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is looked up first may be taken by the time the trainer is built."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with process_state(), rendezvous():
        assert os.environ["MASTER_PORT"] == "0"
        torch.distributed.init_process_group("gloo")
        try:
            assert torch.distributed.get_world_size() == 1
        finally:
            torch.distributed.destroy_process_group()
    assert "RANK" not in os.environ
