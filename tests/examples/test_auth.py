"""The examples of `auth` sign as the published vectors say."""

from __future__ import annotations

import importlib.util
import json
from base64 import urlsafe_b64decode
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tokenbus.providers.auth import CallToSign

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "auth"
CALL = CallToSign(method="POST", url="https://a.example/v1", headers={})
AWS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"}
SIGNED = {
    # The AWS Signature Version 4 test suite: get-vanilla, post-vanilla, get-vanilla-query-order-key-case.
    ("GET", "/"): "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
    ("POST", "/"): "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
    ("GET", "/?Param2=value2&Param1=value1"): "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
}
# RFC 7515, A.2.
N = (
    "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-yRT-SFd2lZS-pC"
    "gNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2CapHg6"
    "65xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5IhlJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRW"
    "yuXpoQ"
)
D = (
    "Eq5xpGnNCivDflJsRQBXHx1hdR1k6Ulwe2JZD50LpXyWPEAeP88vLNO97IjlA7_GQ5sLKMgvfTeXZx9SE-7YwVol2NXOoAJe46sui395IW_GO-pW"
    "J1O0BkTGoVEn2bKVRUCgu-GjBVaYLU6f3l9kJfFNS3E0QbVdxzubSu3Mkqzjkn439X0M_V51gfpRLI9JYanrC4D4qAdGcopV_0ZHHzQlBjudU2Qv"
    "Xt4ehNYTCBr6XCLQUShb1juUO1ZdiYoFaFQT5Tw8bGUl_x_jTj3ccPDVZFD9pIuhLhBOneufuBiB4cS98l2SR_RQyGWSeWjnczT0QU91p1DhOVRu"
    "OopznQ"
)
PAYLOAD = b'{"iss":"joe",\r\n "exp":1300819380,\r\n "http://example.com/is_root":true}'
SIGNATURE = (
    "cC4hiUPoj9Eetdgtv3hF80EGrhuB__dzERat0XF9g2VtQgr9PJbu3XOiZj5RZmh7AAuHIm4Bh-0Qc_lF5YKt_O8W2Fp5jujGbds9uJdbF9CUAr7t"
    "1dnZcAcQjbKBYNX4BAynRFdiuB--f_nZLgrnbyTyWzO75vRK5h6xBArLIARNPvkSjtQBMHlb1L07Qe7K0GarZRmB_eSN9383LcOLn6_dO--xi12j"
    "zDwusC-eOkHWEsqtFZESc6BfI7noOPqvhJ1phCnvWh6IeYI2w9QOYEUipUTI8np6LbgGY9Fs98rqVt5AXLIhWkWywlVmtVrBp0igcN_IoypGlUPQ"
    "Ge77Rw"
)


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def number(text: str) -> int:
    return int.from_bytes(urlsafe_b64decode(text + "=="))


@pytest.fixture
def key() -> rsa.RSAPrivateKey:
    n, e, d = number(N), 65537, number(D)
    p, q = rsa.rsa_recover_prime_factors(n, e, d)
    public = rsa.RSAPublicNumbers(e, n)
    return rsa.RSAPrivateNumbers(p, q, d, d % (p - 1), d % (q - 1), rsa.rsa_crt_iqmp(p, q), public).private_key()


class Issuer:
    """A stand-in for the issuer of tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[httpx.Request] = []
        made = httpx.AsyncClient
        transport = httpx.MockTransport(self._answer)
        monkeypatch.setattr(httpx, "AsyncClient", lambda **how: made(transport=transport, **how))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return httpx.Response(200, json={"access_token": f"token-{len(self.asked)}", "expires_in": 3600})


@pytest.mark.parametrize(("method", "path"), [*SIGNED])
async def test_sigv4_signs_as_awss_test_suite_says(method: str, path: str) -> None:
    at = datetime(2015, 8, 30, 12, 36, tzinfo=UTC)
    auth = example("sigv4").SigV4("us-east-1", "service", AWS, lambda: at)
    headers = await auth.headers(CallToSign(method=method, url=f"https://example.amazonaws.com{path}", headers={}))
    assert headers["x-amz-date"] == "20150830T123600Z"
    assert headers["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "
        f"SignedHeaders=host;x-amz-date, Signature={SIGNED[method, path]}"
    )


def test_a_service_account_signs_as_rfc_7515_says(key: rsa.RSAPrivateKey) -> None:
    signed = example("google_service_account").jws(b'{"alg":"RS256"}', PAYLOAD, key)
    assert signed.rpartition(".")[2] == SIGNATURE


async def test_a_service_accounts_token_is_kept_until_it_is_rejected(
    key: rsa.RSAPrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer(monkeypatch)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    account = {"client_email": "me@example.iam", "private_key": pem, "token_uri": "https://issuer.example/token"}
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    auth = example("google_service_account").vertex()
    assert [await auth.headers(CALL) for _ in range(2)] == [{"authorization": "Bearer token-1"}] * 2
    assert auth.rejected()
    assert await auth.headers(CALL) == {"authorization": "Bearer token-2"}
    assert list(auth.secrets) == ["token-2"]
    assert b"jwt-bearer" in issuer.asked[0].content


async def test_entra_id_asks_with_the_clients_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = Issuer(monkeypatch)
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "s3cret-of-azure")
    auth = example("entra_id").azure("contoso", "client-1")
    assert await auth.headers(CALL) == {"authorization": "Bearer token-1"}
    [request] = issuer.asked
    assert str(request.url) == "https://login.microsoftonline.com/contoso/oauth2/v2.0/token"
    assert b"client_secret=s3cret-of-azure" in request.content
