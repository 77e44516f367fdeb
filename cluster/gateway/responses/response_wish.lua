-- Returns the state of a background response after a wish. After response_state.lua.
--
-- KEYS: its state. ARGV: the wish, milliseconds of a renewal.
return state_after(KEYS[1], ARGV[1], ARGV[2])
