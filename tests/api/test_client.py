"""The client of the command line."""

import ssl
from typing import Any

import httpx2
import pytest

from api.client import Client, Refused, ServerUnreachable
from api.replication.registry_client import HttpOrigin


def test_a_stream_that_breaks_off_is_no_answer(server, engine) -> None:
    engine.breaks(2, ZeroDivisionError())
    with Client(server.url) as client, pytest.raises(ServerUnreachable):
        list(client.chat({"model": "tiny-base", "messages": [{"role": "user", "content": "x"}]}))


@pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
def test_the_name_of_the_base(cli, server, suffix: str) -> None:
    """Also at the address that OpenAI's clients are given."""
    assert cli("generate", "hi", "--server", server.url + suffix).out == "Hello wörld\n"
    with Client(server.url + suffix) as client:
        assert client.base_name() == "tiny-base"
        with pytest.raises(Refused) as caught:
            client.adapter("a/b@c")
    assert caught.value.status == 404


def test_what_does_not_exist_has_no_defaults(server, make_adapter) -> None:
    server.upload(make_adapter(), "mia")
    with Client(server.url) as client:
        assert [client.find_defaults(name) for name in ("mia", "mia@7", "tom")] == [None, None, None]


@pytest.mark.parametrize("connect", [Client, lambda url: HttpOrigin(url, None)])
@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "https://10.0.0.1:8000", "HTTPS://10.0.0.1"])
def test_certificates_are_checked_except_over_plain_http(connect, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain HTTP has none, and reading those of the system takes 25 ms: without any, no TLS connection is trusted."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(httpx2, "Client", lambda **options: given.update(options))
    connect(url)
    if url.startswith("http://"):
        context = given["verify"]
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
        assert context.get_ca_certs() == []
    else:
        assert given["verify"] is True
