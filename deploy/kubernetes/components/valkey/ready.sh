#!/bin/sh
# Whether the server answers: `NOAUTH` is an answer of one that has loaded its data, and needs no password here.
cli=$(command -v valkey-cli || command -v redis-cli)
tls=${TLS:-/run/tls}
set -- -p "${PORT:-6379}"
[ ! -f "$tls/tls.crt" ] || set -- "$@" --tls --cacert "$tls/ca.crt"
"$cli" "$@" ping | grep -Eq 'PONG|NOAUTH'
