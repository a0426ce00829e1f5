//! Guests for tests and demos.
