"""The policy stage; `guards` and `bad_policies` are the policies that it runs here."""
