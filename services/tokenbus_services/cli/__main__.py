"""`python -m tokenbus_services.cli`: the `tokenbus` command of this interpreter."""

from tokenbus_services.cli.entry import main

main()
