"""The worker services and commands of tokenbus. The library, `tokenbus`, never imports this package."""
