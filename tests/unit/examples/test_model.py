"""The quickstart's model: shapes, causality, positions, ties, sampling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch


def tiny(**changes: Any) -> Any:
    from model import ByteLlama, ModelConfig

    torch.manual_seed(0)
    sizes = {"width": 32, "layers": 2, "heads": 4, "ffn": 48, "context": 16} | changes
    return ByteLlama(ModelConfig(**sizes))


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


def test_default_model_has_about_ten_million_parameters() -> None:
    from model import ByteLlama, ModelConfig

    with torch.device("meta"):
        model = ByteLlama(ModelConfig())
    assert 9.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 10.5e6


def test_forward_gives_logits_and_with_targets_their_cross_entropy() -> None:
    model, x = tiny(), tokens()
    logits = model(x)
    assert logits.shape == (2, 12, 256)
    by_hand = -logits.log_softmax(-1).gather(-1, x[..., None]).mean()
    torch.testing.assert_close(model(x, x), by_hand, rtol=1e-6, atol=0)  # the same sum in another order


def test_first_loss_is_near_a_uniform_guess() -> None:
    assert tiny(width=128)(tokens(), tokens()).item() == pytest.approx(math.log(256), abs=0.1)


def test_later_bytes_do_not_reach_earlier_logits() -> None:
    model, x = tiny(), tokens()
    changed = x.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 256
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_order_of_earlier_bytes_matters() -> None:
    model = tiny()
    x = torch.tensor([[1, 2, 3], [2, 1, 3]])
    last = model(x)[:, -1]
    assert not torch.allclose(last[0], last[1], atol=1e-4)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    from model import rotary_angles, rotate

    cos, sin = rotary_angles(8, 16, 10_000.0)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(2)).double()
    turned_q, turned_k = (rotate(v.expand(1, 1, 16, 8), cos.double(), sin.double())[0, 0] for v in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(16), rtol=1e-6, atol=0)  # fp32 angles
    torch.testing.assert_close(turned_q[3] @ turned_k[1], turned_q[12] @ turned_k[10], rtol=1e-5, atol=1e-6)


def test_tied_head_shares_the_weight_and_gets_both_gradients() -> None:
    model = tiny(tied=True)
    assert model.head.weight is model.embed.weight
    model(tokens(), tokens()).backward()
    assert model.embed.weight.grad.abs().sum() > 0
    assert len(list(model.parameters())) == len(list(tiny().parameters())) - 1


def test_too_long_a_sequence_and_odd_head_widths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sequence of 17 tokens.*context=16"):
        tiny()(tokens(1, 17))
    with pytest.raises(ValueError, match="multiple of 2 x heads"):
        tiny(width=36)


def test_generate_is_a_function_of_weights_prompt_and_seed() -> None:
    model = tiny()
    prompt = torch.tensor([[100, 101]])
    text = model.generate(prompt, 20, seed=3)
    assert text.shape == (1, 22)
    assert torch.equal(text[:, :2], prompt)
    assert torch.equal(text, model.generate(prompt, 20, seed=3))
    assert not torch.equal(text, model.generate(prompt, 20, seed=4))


def test_generate_at_temperature_zero_takes_the_likeliest_byte() -> None:
    model = tiny()
    prompt = torch.tensor([[100, 101]])
    text = model.generate(prompt, 25, temperature=0)
    for length in range(2, 27):  # context 16: positions run out after 16 bytes and after 25; the last 8 are kept
        first = 0 if length <= 16 else 9 if length <= 25 else 18
        assert text[0, length] == model(text[:, first:length])[0, -1].argmax()


def test_it_learns_one_line_by_heart() -> None:
    model = tiny(width=64)
    line = torch.tensor([list(b"the quick brown")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(line[:, :-1], line[:, 1:]).backward()
        optimizer.step()
    assert bytes(model.generate(line[:, :4], 11, temperature=0)[0].tolist()) == b"the quick brown"
