//! How long it takes to find everything in the memory of a stock 6.1 guest, and to plan all its pads.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use guest_images::{Architecture, Series};
use patcher::addr::Gva;
use patcher::kernel::{Located, locate};
use patcher::machine::{Registers, StopError, StopTimes, Stopped, TextWrite, TextWriteError};
use patcher::patch::{Patchset, Site};
use tests::capture::Captured;
use vm_memory::Bytes;

fn discovery(criterion: &mut Criterion) {
    let guest = Captured::new(Architecture::X86_64, Series::V6_1, "max", "");
    let kernel = guest.kernel();
    let symbols = kernel.symbols().len();
    let pads = kernel.pads(&guest.ram).expect("the kernel lists its pads");
    println!("Linux {}, {symbols} symbols, {} pads", kernel.release(), pads.sites.len());

    let mut group = criterion.benchmark_group("discovery");
    group.bench_function("kernel and symbols", |bencher| {
        bencher.iter(|| match locate(&guest.ram, &guest.vcpus) {
            Ok(Located::Found(kernel)) => kernel,
            other => panic!("{other:?}"),
        });
    });
    group.bench_function("pads", |bencher| {
        bencher.iter(|| kernel.pads(&guest.ram).expect("the kernel lists its pads"));
    });
    group.bench_function("kernel, symbols and pads", |bencher| {
        bencher.iter(|| match locate(&guest.ram, &guest.vcpus) {
            Ok(Located::Found(kernel)) => kernel.pads(&guest.ram).expect("as before").sites.len(),
            other => panic!("{other:?}"),
        });
    });

    let trampoline = Gva(0xffff_ffff_be00_0000);
    let plan = || {
        let sites = pads.sites.iter().map(|site| Site {
            function: (&*site.name).into(),
            at: site.at,
            gpa: site.gpa,
            original: site.original,
            replacement: kernel.arch().encode_branch(site.at, trampoline).expect("reach"),
        });
        Patchset::plan(sites.collect()).expect("a patchset")
    };
    group.bench_function("plan all pads", |bencher| {
        bencher.iter(|| {
            let patchset = plan();
            black_box(patchset.prepare(&guest.ram));
        });
    });

    // What an arming stop does with the guest at a standstill, and the stop that puts it back.
    let patchset = plan();
    let mut stopped = Standstill(&guest);
    group.bench_function("in the stops: compare, write, read back, put back", |bencher| {
        let prepared = patchset.prepare(&guest.ram);
        bencher.iter(|| {
            let verified = prepared.verify(&mut stopped, 2).expect("as they were");
            let applied = verified.apply().expect("they can be written");
            let reverted = applied.prepare_revert(&guest.ram).run(&mut stopped);
            assert_eq!(reverted.restored, pads.sites.len());
        });
    });
    group.finish();
}

/// A captured guest stands still by itself.
struct Standstill<'a>(&'a Captured);

impl Stopped for Standstill<'_> {
    fn registers(&mut self, vcpu: usize) -> Result<Registers, StopError> {
        Ok(self.0.vcpus[vcpu])
    }

    fn write_text(&mut self, writes: &[TextWrite<'_>]) -> Result<(), TextWriteError> {
        for (index, &TextWrite { at, bytes }) in writes.iter().enumerate() {
            self.0.ram.write_slice(bytes, at.into()).map_err(|error| TextWriteError {
                index,
                at,
                reason: error.to_string(),
            })?;
        }
        Ok(())
    }

    fn resume(self: Box<Self>) -> Result<StopTimes, StopError> {
        Ok(StopTimes::default())
    }
}

criterion_group!(benches, discovery);
criterion_main!(benches);
