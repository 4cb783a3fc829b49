"""Microsoft Entra ID, for Azure: exchanges a client secret (AZURE_CLIENT_SECRET) for a token of an hour."""

import asyncio
import os
import time

import httpx

from tokenbus.providers import Token, TokenAuth

SCOPE = "https://cognitiveservices.azure.com/.default"
LOGIN = "https://login.microsoftonline.com"


def azure(tenant: str, client: str, login: str = LOGIN) -> TokenAuth:
    """`auth = "entra_id:azure"` with `auth_options = { tenant = "…", client = "…" }`."""
    return TokenAuth(lambda: fetch(login, tenant, client), clock=time.monotonic, lock=asyncio.Lock())


async def fetch(login: str, tenant: str, client: str) -> Token:
    """https://learn.microsoft.com/entra/identity-platform/v2-oauth2-client-creds-grant-flow"""
    form = {
        "grant_type": "client_credentials",
        "client_id": client,
        "client_secret": os.environ["AZURE_CLIENT_SECRET"],
        "scope": SCOPE,
    }
    async with httpx.AsyncClient(timeout=30) as http:
        answer = (await http.post(f"{login}/{tenant}/oauth2/v2.0/token", data=form)).raise_for_status().json()
    return Token(answer["access_token"], float(answer["expires_in"]))
