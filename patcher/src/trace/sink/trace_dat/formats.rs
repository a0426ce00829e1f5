//! The events that a file has, as the kernel describes them in tracefs' `format` files, and their fields.

use super::super::{Event, EventKind, Return};
use crate::arch::ByteOrder;

/// Bytes of the longest event's fields.
pub const MAX_BYTES: usize = 48;

/// Numbers of the events (`TRACE_FN`, `TRACE_GRAPH_RET` and `TRACE_GRAPH_ENT` in the kernel's
/// `kernel/trace/trace.h`).
const FUNCTION_ID: u16 = 1;
const EXIT_ID: u16 = 10;
const ENTRY_ID: u16 = 11;

const FUNCTION: &str = "\
name: function
ID: 1
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:unsigned long ip;\toffset:8;\tsize:8;\tsigned:0;
\tfield:unsigned long parent_ip;\toffset:16;\tsize:8;\tsigned:0;

print fmt: \" %ps <-- %ps\", (void *)REC->ip, (void *)REC->parent_ip
";

const ENTRY: &str = "\
name: funcgraph_entry
ID: 11
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:unsigned long func;\toffset:8;\tsize:8;\tsigned:0;
\tfield:int depth;\toffset:16;\tsize:4;\tsigned:1;

print fmt: \"--> %ps (%d)\", (void *)REC->func, REC->depth
";

/// With the fields of a kernel that has `CONFIG_FUNCTION_GRAPH_RETVAL`, in an order in which all of them are
/// aligned.
const EXIT: &str = "\
name: funcgraph_exit
ID: 10
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:unsigned long func;\toffset:8;\tsize:8;\tsigned:0;
\tfield:int depth;\toffset:16;\tsize:4;\tsigned:1;
\tfield:unsigned int overrun;\toffset:20;\tsize:4;\tsigned:0;
\tfield:unsigned long long calltime;\toffset:24;\tsize:8;\tsigned:0;
\tfield:unsigned long long rettime;\toffset:32;\tsize:8;\tsigned:0;
\tfield:unsigned long retval;\toffset:40;\tsize:8;\tsigned:0;

print fmt: \"<-- %ps (%d) (start: %llx  end: %llx) over: %u retval: %lx\", (void *)REC->func, \
REC->depth, REC->calltime, REC->rettime, REC->overrun, REC->retval
";

/// All of them.
pub const FORMATS: [&str; 3] = [FUNCTION, ENTRY, EXIT];

/// Appends an event's fields, those that all events have among them.
pub fn encode(event: &Event<'_>, order: ByteOrder, fields: &mut Vec<u8>) {
    let id = match event.kind {
        EventKind::Call => FUNCTION_ID,
        EventKind::Entry { .. } => ENTRY_ID,
        EventKind::Return(_) => EXIT_ID,
    };
    let context = event.context.unwrap_or_default();
    fields.extend_from_slice(&order.bytes_of_u16(id));
    fields.extend([context.flags(), context.preempt_depth]);
    fields.extend_from_slice(&order.bytes_of_u32(event.task.map_or(0, |task| task.pid)));
    fields.extend_from_slice(&order.bytes(event.function.address));
    match event.kind {
        EventKind::Call => fields.extend_from_slice(&order.bytes(event.caller.address)),
        EventKind::Entry { depth } => fields.extend_from_slice(&order.bytes_of_u32(depth)),
        EventKind::Return(Return { depth, value, duration_ns }) => {
            fields.extend_from_slice(&order.bytes_of_u32(depth));
            fields.extend_from_slice(&order.bytes_of_u32(0));
            let called = event.time_ns.saturating_sub(duration_ns.unwrap_or(0));
            for word in [called, event.time_ns, value] {
                fields.extend_from_slice(&order.bytes(word));
            }
        }
    }
}
