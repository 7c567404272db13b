"""What the server does with a round: aggregators and server rules."""
