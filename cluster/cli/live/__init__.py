"""`tandem top` and `tandem drain`: verbs that follow a running service for a while."""
