"""Logits to next tokens: sampler, logits processors, log-probabilities, watermark."""
