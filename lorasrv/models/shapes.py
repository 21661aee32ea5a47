"""Shapes of well-known models, to be measured with random weights (`--load-format dummy`)."""

from lorasrv.models.spec import ModelSpec, RopeSpec

SHAPES = {
    "llama-3-8b": ModelSpec(
        family="llama",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position=8192,
        norm_eps=1e-5,
        rope=RopeSpec(theta=500_000.0),
        eos_token_ids=(128001,),
        bos_token_id=128000,
    )
}
"""Built-in shapes, by the name that `--model` takes."""
