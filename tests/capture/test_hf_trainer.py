"""The Trainer of Hugging Face: a loop that nobody here wrote, with accumulation, clipping and a scheduler."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from pathlib import Path

import pytest
import torch

from bridge.capture import capture_run, load_capture
from bridge.config import BridgeConfig, TrainConfig

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"{name} is not installed; it is no dependency"
    )
    for name in ("transformers", "accelerate")
]

SCRIPT = """
    import json, sys
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    ))

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            ids = torch.arange(index, index + 16) % 64
            return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(
        output_dir=sys.argv[1] + ".out", max_steps=4, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_grad_norm=0.5, report_to=[], save_strategy="no", logging_steps=1,
        use_cpu=True, disable_tqdm=True, seed=1,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    torch.save(model.state_dict(), sys.argv[1] + ".pt")
    with open(sys.argv[1] + ".json", "w") as file:
        json.dump(trainer.state.log_history, file)
"""


def test_a_step_of_the_trainer(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")

    def run(name: str, step: int) -> Path:
        config = BridgeConfig(train=TrainConfig(script=str(script), args=(str(tmp_path / name),)))
        return capture_run(config, step=step, ops=["*"], out=tmp_path / f"c{step}", stop=False).path

    capture = load_capture(run("one", 3))
    assert capture.complete
    logged = json.loads((tmp_path / "one.json").read_text())
    loss = next(entry["loss"] for entry in logged if entry.get("step") == 3)
    assert capture.manifest.metrics["loss"] == pytest.approx(float(loss), rel=1e-3)
    assert {call.microbatch for call in capture.calls if call.phase == "forward"} == {0, 1}
    assert capture.find("model.layers.1.self_attn.q_proj")
    assert {call.phase for call in capture.calls} >= {"forward", "backward", "optimizer"}
    norm = capture.find("LlamaRMSNorm")[0]
    tensors = capture.tensors(norm)
    expected = torch.nn.functional.rms_norm(tensors["inputs/0"], (32,), tensors["params/weight"], eps=1e-6)
    torch.testing.assert_close(tensors["outputs/0"], expected)
    # Another step captured: the model that comes out is the same bit for bit.
    run("two", 1)
    left, right = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt")
    assert all(torch.equal(left[name], right[name]) for name in left)
