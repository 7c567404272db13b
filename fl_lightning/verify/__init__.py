"""`fl-lightning verify`: the product proves its algorithms on the user's machine, on the code that trains."""
