-- Deletes a file. After file_drop.lua. Returns whether it was there, and whole.
return drop(id)
