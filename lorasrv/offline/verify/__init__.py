"""`lorasrv verify`: what this server computes with a stored adapter, beside what transformers and PEFT compute.

The server's part (`verifier.py`, `job.py`, `verdict.py`) imports no torch. The rest runs in a process of its own.
"""
