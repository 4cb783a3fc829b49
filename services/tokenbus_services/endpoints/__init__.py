"""The configured providers over HTTP: addresses, credentials, and the bodies of their answers. Calls are made above."""
