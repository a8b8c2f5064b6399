// Rows in shared memory, or where they are.
ATTENTION(attention, true)
ATTENTION(attention_in_place, false)
