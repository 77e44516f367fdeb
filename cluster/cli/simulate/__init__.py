"""`tandem simulate`: a service on a virtual clock."""
