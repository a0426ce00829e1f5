//! What an address is: guest-physical or guest-virtual, never interchangeable.

use std::fmt;
use std::ops::{Add, Sub};

use vm_memory::GuestAddress;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);

        impl $name {
            /// The address `bytes` further on, or `None` past the end of the address space.
            #[must_use]
            pub fn checked_add(self, bytes: u64) -> Option<Self> {
                self.0.checked_add(bytes).map(Self)
            }

            /// The address rounded down to a multiple of `align`, which is a power of two.
            #[must_use]
            pub fn align_down(self, align: u64) -> Self {
                debug_assert!(align.is_power_of_two());
                Self(self.0 & !(align - 1))
            }

            /// The distance in bytes from `origin` up to this address, or `None` if this address
            /// lies below it.
            #[must_use]
            pub fn offset_from(self, origin: Self) -> Option<u64> {
                self.0.checked_sub(origin.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        /// Wraps at the end of the address space, as the guest's own arithmetic does: addresses
        /// and distances that come from a guest may be anything.
        impl Add<u64> for $name {
            type Output = Self;
            fn add(self, bytes: u64) -> Self {
                Self(self.0.wrapping_add(bytes))
            }
        }

        /// Wraps below zero, as the guest's own arithmetic does.
        impl Sub<u64> for $name {
            type Output = Self;
            fn sub(self, bytes: u64) -> Self {
                Self(self.0.wrapping_sub(bytes))
            }
        }
    };
}

address! {
    /// A guest-physical address, in bytes.
    Gpa
}

address! {
    /// A guest-virtual address, in bytes, in the guest kernel's own address space.
    Gva
}

impl From<Gpa> for GuestAddress {
    fn from(gpa: Gpa) -> Self {
        GuestAddress(gpa.0)
    }
}

impl From<GuestAddress> for Gpa {
    fn from(address: GuestAddress) -> Self {
        Gpa(address.0)
    }
}
