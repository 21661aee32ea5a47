"""Redeploy replicas with other options, as an operator of a Ray cluster would: `redeploy.py HOME SHAPE OPTIONS`, the
last two as JSON, where HOME is the folder of a running `lorasrv serve --replicas N`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(home: Path, shape: dict[str, Any], options: dict[str, Any]) -> None:
    session = max(home.glob("ray*/session_2*"))
    port = next(session.glob("gcs_server_port_*")).read_text()
    pem = {"CERT": "certificate", "KEY": "key"}
    os.environ.update({f"RAY_TLS_SERVER_{name}": str(home / f"{file}.pem") for name, file in pem.items()})
    os.environ.update(
        RAY_USE_TLS="1",
        RAY_TLS_CA_CERT=str(home / "certificate.pem"),
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(home / "token"),
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
    )
    import ray
    from ray import serve

    from api.cluster.app import application
    from api.cluster.shape import ClusterShape
    from api.config.sources import Sources

    shape["cache"] = Path(str(shape["cache"]))
    ray.init(address=f"127.0.0.1:{port}", log_to_driver=False)
    target = serve.RunTarget(application(Sources.of_flags(options).settings(), ClusterShape(**shape)), "lorasrv", None)
    serve.run_many([target], wait_for_applications_running=True)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(json.loads, sys.argv[2:]))
