//! Memory that QEMU gives a guest as a PCI device (`ivshmem-plain`), of which a kernel makes nothing.

use patcher::addr::Gpa;
use patcher::region::{LEAF_BYTES, Part};
use serde_json::{Value, json};

use super::QmpError;
use super::qmp::Qmp;

/// The vendor and device numbers of such a device (QEMU's `docs/specs/ivshmem-spec.rst`).
const NUMBERS: (u64, u64) = (0x1af4, 0x1110);

/// Which of its address registers leads to the memory.
const MEMORY_BAR: u64 = 2;

/// The id that tells which of several is for us.
const OURS: &str = "vmm";

/// The most devices that are looked at.
const MOST: usize = 64;

/// The least memory that is of use: rings of one leaf.
pub(super) const LEAST: u64 = Part::Rings.offset() + LEAF_BYTES;

/// An ivshmem device whose memory the guest can reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Device {
    /// What it is called, for people.
    pub name: String,
    /// Where the memory is in the guest.
    pub gpa: Gpa,
    /// How many bytes.
    pub size: u64,
    /// The path of its backend in QEMU's object model.
    pub backend: String,
}

/// There is no ivshmem device that could be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IvshmemError {
    /// There is none at all.
    #[error("QEMU has no ivshmem-plain device")]
    Absent,
    /// It can't be told which is for us.
    #[error("QEMU has {0} ivshmem-plain devices, none of which has the id {OURS}")]
    Several(usize),
    /// Nobody has mapped it, or not all of it.
    #[error(
        "the ivshmem device at {bus:02x}:{slot:02x}.{function} is not mapped by the guest's firmware or \
         kernel, which `echo 1 > /sys/bus/pci/devices/0000:{bus:02x}:{slot:02x}.{function}/enable` in the \
         guest does"
    )]
    NotMapped {
        /// Its bus.
        bus: u64,
        /// Its slot.
        slot: u64,
        /// Its function.
        function: u64,
    },
    /// Its memory can't be shared.
    #[error("the memory of {0} is QEMU's alone, as its backend lacks share=on")]
    Private(String),
    /// It is too small.
    #[error("{name} has {size} bytes, and {LEAST} are the least")]
    TooSmall {
        /// What it is called.
        name: String,
        /// How much it has.
        size: u64,
    },
    /// There is one, and the region is elsewhere already.
    #[error("an earlier vmm had them there")]
    Later,
    /// Its memory is somebody's.
    #[error(
        "the memory of {0} is not empty: somebody else uses it, or the journal of an earlier vmm is lost"
    )]
    Taken(String),
}

/// Finds the device that is for us: the only one, or the one with the id `vmm`.
///
/// # Errors
/// What the monitor says; inside, what keeps a device from being used.
pub(super) fn find(qmp: &mut Qmp) -> Result<Result<Device, IvshmemError>, QmpError> {
    let mut devices = Vec::new();
    for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let children = get(qmp, "qom-list", &json!({ "path": folder }))?;
        let is_one = |child: &&Value| child["type"] == "child<ivshmem-plain>";
        let found = children.as_array().into_iter().flatten().filter(is_one);
        let names = found.filter_map(|child| child["name"].as_str());
        devices.extend(names.map(|name| (name.to_owned(), format!("{folder}/{name}"))));
    }
    devices.truncate(MOST);
    let ours = devices.iter().find(|(name, _)| name == OURS);
    let (name, path) = match (ours, devices.as_slice()) {
        (Some(ours), _) | (None, [ours]) => ours.clone(),
        (None, []) => return Ok(Err(IvshmemError::Absent)),
        (None, several) => return Ok(Err(IvshmemError::Several(several.len()))),
    };
    let slot = property(qmp, &path, "addr")?.as_u64().unwrap_or(u64::MAX);
    let backend = property(qmp, &path, "memdev")?.as_str().unwrap_or_default().to_owned();
    let buses = qmp.execute("query-pci")?;
    let Some(place) = place(&buses, &name, slot) else { return Ok(Err(IvshmemError::Absent)) };
    let name = format!("the ivshmem device at {}", place.address());
    if property(qmp, &backend, "share")? != Value::Bool(true) {
        return Ok(Err(IvshmemError::Private(name)));
    }
    let size = property(qmp, &backend, "size")?.as_u64().unwrap_or_default();
    if size < LEAST {
        return Ok(Err(IvshmemError::TooSmall { name, size }));
    }
    let Some(gpa) = place.memory else { return Ok(Err(place.not_mapped())) };
    for at in [gpa, gpa + (size - 1)] {
        let line = format!("gpa2hva {:#x}", at.0);
        let said = get(qmp, "human-monitor-command", &json!({ "command-line": line }))?;
        if !is_of(said.as_str().unwrap_or_default(), &backend) {
            return Ok(Err(place.not_mapped()));
        }
    }
    Ok(Ok(Device { name, gpa, size, backend }))
}

/// Where a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    bus: u64,
    slot: u64,
    function: u64,
    /// Where its memory is in the guest, if its address register says so and counts.
    memory: Option<Gpa>,
}

impl Place {
    fn address(&self) -> String {
        format!("{:02x}:{:02x}.{}", self.bus, self.slot, self.function)
    }

    fn not_mapped(&self) -> IvshmemError {
        let Self { bus, slot, function, .. } = *self;
        IvshmemError::NotMapped { bus, slot, function }
    }
}

/// The device of that name, or else the only one in that slot, among all that `query-pci` tells of.
fn place(buses: &Value, name: &str, slot: u64) -> Option<Place> {
    let mut found = Vec::new();
    let mut waiting: Vec<&Value> = buses.as_array()?.iter().collect();
    while let Some(bus) = waiting.pop() {
        for device in bus["devices"].as_array().into_iter().flatten() {
            // Behind a bridge there is another bus.
            waiting.push(&device["pci_bridge"]);
            let numbers = (device["id"]["vendor"].as_u64(), device["id"]["device"].as_u64());
            if numbers == (Some(NUMBERS.0), Some(NUMBERS.1)) {
                found.push(device);
            }
        }
    }
    let number = |device: &Value, key: &str| device[key].as_u64().unwrap_or_default();
    let named = found.iter().find(|device| device["qdev_id"] == name);
    let mut there = found.iter().filter(|device| {
        device["qdev_id"] == "" && number(device, "slot") << 3 | number(device, "function") == slot
    });
    let device = named.or_else(|| there.next().filter(|_| there.next().is_none()))?;
    let regions = device["regions"].as_array().into_iter().flatten();
    let memory = regions.filter(|region| number(region, "bar") == MEMORY_BAR);
    // What is not mapped is at -1.
    let at = memory.filter_map(|region| region["address"].as_u64()).find(|at| *at != 0);
    Some(Place {
        bus: number(device, "bus"),
        slot: number(device, "slot"),
        function: number(device, "function"),
        memory: at.filter(|at| at % LEAF_BYTES == 0).map(Gpa),
    })
}

/// Whether the answer to `gpa2hva` names the memory of that backend, by its id or by its path.
fn is_of(said: &str, backend: &str) -> bool {
    let name = said.split_once('(').and_then(|(_, rest)| rest.split_once(") is "));
    let id = backend.rsplit('/').next().unwrap_or_default();
    name.is_some_and(|(name, _)| !id.is_empty() && (name == id || name == backend))
}

fn property(qmp: &mut Qmp, path: &str, property: &str) -> Result<Value, QmpError> {
    get(qmp, "qom-get", &json!({ "path": path, "property": property }))
}

/// What a monitor answers; nothing where there is nothing of that name.
fn get(qmp: &mut Qmp, command: &'static str, arguments: &Value) -> Result<Value, QmpError> {
    match qmp.execute_with(command, arguments) {
        Err(QmpError::Refused { .. }) => Ok(Value::Null),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(slot: u64, id: &str, address: i64) -> Value {
        json!({
            "bus": 0, "slot": slot, "function": 0, "qdev_id": id,
            "id": { "vendor": 0x1af4, "device": 0x1110 },
            "regions": [
                { "bar": 0, "address": 0xfebf_e000_u64, "size": 256 },
                { "bar": 2, "address": address, "size": 64 << 20 },
            ],
        })
    }

    #[test]
    fn a_device_is_known_by_its_name_or_else_by_its_slot() {
        let buses = json!([{ "bus": 0, "devices": [
            { "bus": 0, "slot": 0, "id": { "vendor": 0x8086, "device": 0x29c0 }, "regions": [] },
            device(1, "", 0xf800_0000),
            { "bus": 0, "slot": 2, "id": { "vendor": 0x1b36, "device": 0xc }, "pci_bridge": {
                "bus": {}, "devices": [device(3, "vmm", 0x80_0000_0000)],
            } },
            device(4, "", -1),
        ] }]);
        let at = |name, slot| place(&buses, name, slot).unwrap().memory;
        assert_eq!(at("vmm", 0), Some(Gpa(0x80_0000_0000)));
        assert_eq!(at("device[0]", 1 << 3), Some(Gpa(0xf800_0000)));
        assert_eq!(at("device[1]", 4 << 3), None);
        assert_eq!(place(&buses, "device[2]", 5 << 3), None);
        let twice = json!([{ "devices": [device(1, "", 1 << 30), device(1, "", 2 << 30)] }]);
        assert_eq!(place(&twice, "device[0]", 1 << 3), None);
        for nonsense in [json!(null), json!([1]), json!([{ "devices": [[]] }])] {
            assert_eq!(place(&nonsense, "vmm", 0), None);
        }
    }

    #[test]
    fn memory_is_the_devices_only_if_qemu_names_it() {
        let said = "Host virtual address for 0xf8000000 (vmm) is 0x7fc7a0000000\r\n";
        assert!(is_of(said, "/objects/vmm"));
        assert!(is_of(&said.replace("vmm", "/objects/vmm"), "/objects/vmm"));
        assert!(!is_of(said, "/objects/ram") && !is_of(said, ""));
        assert!(!is_of("No memory is mapped at address 0xf8000000\r\n", "/objects/vmm"));
    }
}
