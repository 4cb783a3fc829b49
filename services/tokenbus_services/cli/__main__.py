"""`python -m tokenbus_services.cli`: the `tokenbus` command of this very interpreter."""

from tokenbus_services.cli.entry import main

main()
