//! A guest's kernel, from its memory alone.
