"""The provider APIs that the mock provider serves, one module each, under one interface."""
