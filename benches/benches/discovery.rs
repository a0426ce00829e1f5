//! How long it takes to find everything in the memory of a stock 6.1 guest, and to plan all its pads.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use guest_images::Series;
use patcher::addr::Gva;
use patcher::kernel::{Located, locate};
use patcher::patch::{Patchset, Site};
use tests::capture::Captured;

fn discovery(criterion: &mut Criterion) {
    let guest = Captured::new(Series::V6_1, "max", "");
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
    group.bench_function("plan all pads", |bencher| {
        bencher.iter(|| {
            let sites = pads.sites.iter().map(|site| Site {
                function: (&*site.name).into(),
                at: site.at,
                gpa: site.gpa,
                original: site.original,
                replacement: kernel.arch().encode_branch(site.at, trampoline).expect("reach"),
            });
            let patchset = Patchset::plan(sites.collect()).expect("a patchset");
            black_box(patchset.prepare());
        });
    });
    group.finish();
}

criterion_group!(benches, discovery);
criterion_main!(benches);
