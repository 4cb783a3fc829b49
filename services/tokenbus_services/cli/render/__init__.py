"""What commands print: tables, plain text, live views of runs. Terminal escapes of models end here."""
