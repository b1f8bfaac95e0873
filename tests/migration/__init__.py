"""Updates of migrated commands against those of verl and OpenRLHF themselves: `make test-migration`."""
