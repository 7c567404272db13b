"""The client side inside Lightning."""
