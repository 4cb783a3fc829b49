"""Google Cloud, for Vertex AI: exchanges the key file (GOOGLE_APPLICATION_CREDENTIALS) for a token of an hour."""

import asyncio
import json
import os
import time
from base64 import urlsafe_b64encode
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tokenbus.providers import Token, TokenAuth

SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def vertex() -> TokenAuth:
    """`auth = "google_service_account:vertex"`."""
    return TokenAuth(fetch, clock=time.monotonic, lock=asyncio.Lock())


async def fetch() -> Token:
    """https://developers.google.com/identity/protocols/oauth2/service-account"""
    account = json.loads(await asyncio.to_thread(Path(os.environ["GOOGLE_APPLICATION_CREDENTIALS"]).read_text))
    key = load_pem_private_key(account["private_key"].encode(), None)
    assert isinstance(key, RSAPrivateKey)
    now, url = int(time.time()), account["token_uri"]
    claims = {"iss": account["client_email"], "scope": SCOPE, "aud": url, "iat": now, "exp": now + 3600}
    signed = jws(b'{"alg":"RS256"}', json.dumps(claims).encode(), key)
    form = {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": signed}
    async with httpx.AsyncClient(timeout=30) as http:
        answer = (await http.post(url, data=form)).raise_for_status().json()
    return Token(answer["access_token"], float(answer["expires_in"]))


def jws(header: bytes, payload: bytes, key: RSAPrivateKey) -> str:
    """RFC 7515, 3.1."""
    signed = f"{base64url(header)}.{base64url(payload)}"
    return f"{signed}.{base64url(key.sign(signed.encode(), PKCS1v15(), SHA256()))}"


def base64url(data: bytes) -> str:
    """Without padding."""
    return urlsafe_b64encode(data).rstrip(b"=").decode()
