"""A Llama-style decoder over bytes: the model of the quickstart, in plain PyTorch.

Owns: the architecture, its initialisation, the loss, sampling.
Does not own: data, training, anything distributed. Nothing here knows that DeepSpeed exists; any `nn.Module` is
trained the same way.
Invariant: `forward(tokens, targets)` depends on nothing but its arguments and the parameters (no dropout, no state), so
two processes with equal weights compute equal losses.

Shapes: B batch, T positions, C model width, H heads, D = C / H head width, V = 256 byte values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256  # one token per byte value; text needs no tokenizer


@dataclass(frozen=True)
class ModelConfig:
    """Size of the decoder. The defaults give about 10 million parameters.

    `ffn` is the inner width of the gated feed-forward layer, `context` the longest sequence (positions), `tied` makes
    the output head share the embedding's weight.
    """

    width: int = 512
    layers: int = 3
    heads: int = 8
    ffn: int = 1408
    context: int = 128
    rope_base: float = 10_000.0
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"width {self.width} must be a multiple of 2 x heads ({2 * self.heads}): rotary positions turn pairs "
                "of channels inside each head"
            )


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dim, then scale per channel (Zhang & Sennrich, 2019)."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_angles(head_width: int, context: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding (Su et al., 2021), each of shape (context, head_width / 2), fp32."""
    frequencies = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + D/2) of x (B, H, T, D) by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Past:
    """Keys and values of the positions one attention layer has seen, (B, H, T, D) each, so that sampling computes each
    position once."""

    def __init__(self) -> None:
        self.seen: tuple[Tensor, Tensor] | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new positions and return all of them."""
        if self.seen is not None:
            k, v = torch.cat((self.seen[0], k), dim=2), torch.cat((self.seen[1], v), dim=2)
        self.seen = (k, v)
        return self.seen


class Attention(nn.Module):
    """Causal self-attention with rotary positions; (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = past.extend(k, v)
        # One new position may see everything before it; several start at position 0 and are masked.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, 2020); (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Past | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, past)
        return x + self.ffn(self.ffn_norm(x))


class ByteLlama(nn.Module):
    """The decoder. `forward(tokens)` gives logits (B, T, V); with `targets` it gives the mean cross entropy in nats."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCAB, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCAB, bias=False)
        cos, sin = rotary_angles(config.width // config.heads, config.context, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()
        if config.tied:
            self.embed.weight = self.head.weight

    def _initialise(self) -> None:
        """Normal(0, 1/sqrt(fan_in)) weights; residual outputs shrunk by depth: a block starts near the identity."""
        residual_scale = (2 * self.config.layers) ** -0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                gain = residual_scale if name.endswith((".out", ".down")) else 1.0
                nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)
        # A residual stream near unit size, and small logits: the first loss is near a uniform guess's, ln 256 = 5.55.
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self._logits(tokens, 0, [None] * len(self.blocks))
        if targets is None:
            return logits
        # The loss is taken in fp32: a bf16 log-softmax keeps 3 significant digits only.
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _logits(self, tokens: Tensor, start: int, past: Sequence[Past | None]) -> Tensor:
        """Logits of `tokens`, which stand at positions `start` and up, after what `past` has seen."""
        end = start + tokens.shape[1]
        if end > self.config.context:
            raise ValueError(f"sequence of {end} tokens, but the model was built for context={self.config.context}")
        x = self.embed(tokens)
        cos, sin = self.cos[start:end].to(x.dtype), self.sin[start:end].to(x.dtype)
        for block, seen in zip(self.blocks, past, strict=True):
            x = block(x, cos, sin, seen)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int, *, temperature: float = 0.8, seed: int = 0) -> Tensor:
        """Append `count` sampled bytes to `prompt` (B, T), int64; returns (B, T + count) on the prompt's device.

        Each byte sees between a half and all of the last `context` bytes. `temperature=0` takes the likeliest byte. The
        result depends on weights, prompt and seed alone.
        """
        # Sampling happens on the host so that one seed gives one text whatever the device is.
        generator = torch.Generator().manual_seed(seed)
        tokens, past, position = prompt, [], self.config.context
        for _ in range(count):
            if position == self.config.context:  # at the start, and where positions run out: go on from the last half
                fed, position, past = tokens[:, -(self.config.context // 2) :], 0, [Past() for _ in self.blocks]
            else:
                fed = tokens[:, -1:]
            logits = self._logits(fed, position, past)[:, -1].float().cpu()
            position += fed.shape[1]
            if temperature == 0:
                drawn = logits.argmax(dim=-1, keepdim=True)
            else:
                probabilities = torch.softmax(logits / temperature, dim=-1)
                drawn = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat((tokens, drawn.to(tokens.device)), dim=1)
        return tokens
