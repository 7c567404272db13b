"""What leaves a client: named, typed, clipped, noised and declared to the ledger."""
