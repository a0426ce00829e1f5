//! How fast rings are drained.

use std::time::Instant;

use benches::native::{NativeGuest, Pad};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use patcher::arch::ByteOrder;
use patcher::trace::merge::Merger;
use patcher::trace::ring::RingReader;

/// Records in the ring at a time: half of a 16 MiB ring.
const RECORDS: u64 = 1 << 18;

fn drain(criterion: &mut Criterion) {
    let guest = NativeGuest::new(16 << 20, true).expect("low memory and GS");
    let function = guest.function(Pad::Armed);
    let mut merger = Merger::default();
    let mut group = criterion.benchmark_group("drain");
    group.throughput(Throughput::Elements(RECORDS));
    group.bench_function("read and merge", |bencher| {
        bencher.iter_batched(
            || {
                let reader =
                    RingReader::new(&guest.rings().memory, guest.layout(), 0, ByteOrder::Little)
                        .expect("the ring lies in its window");
                (0..RECORDS).for_each(|_| function());
                reader
            },
            |mut reader| {
                let window = guest.rings();
                reader.look(&window.memory);
                while !reader.read(&window.memory, merger.incoming(), 1 << 16) {}
                let mut count = 0;
                merger.pass(reader.pending(), Instant::now(), |_| count += 1);
                // Nothing follows, which the next pass sees.
                merger.pass(reader.pending(), Instant::now(), |_| count += 1);
                assert_eq!((count, reader.lost()), (RECORDS, 0));
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, drain);
criterion_main!(benches);
