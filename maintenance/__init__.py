"""What maintains the repository: the documentation site, releases, and the hook of the package's build."""
