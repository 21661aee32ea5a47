"""Compare what this server computes with a stored adapter with what transformers and PEFT compute (`lorasrv
verify`).

The server's part (`verifier.py`, `job.py`, `verdict.py`) is torch-free. The rest runs in its own process.
"""
