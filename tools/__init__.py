"""Scripts for those who build Tandem; nothing in the product imports them."""
